"""What words of the command line mean: mixers by their class, recipes by name or file. Nothing is imported for it."""

from seqarch.errors import UserError, unknown
from seqarch.experiment.recipes import SIZE, bundled_recipes
from seqarch.plugins import MIXERS, entries

ALIASES = {"TransformerPlusPlus": "transformer_pp", "Transformer++": "transformer_pp", "Transformer": "transformer"}


def meant(name: str) -> str:
    """The mixer's class, or the recipe's name or file, that a word means.

    Raises:
        UserError: there is no such mixer or recipe; a file is not looked for.
    """
    word = ALIASES.get(name, name)
    mixers, recipes = entries(MIXERS), bundled_recipes()
    if word in mixers or word.endswith((".yaml", ".yml")) or word in recipes or word + SIZE in recipes:
        return word
    error = unknown("mixer or recipe", name, {*mixers, *(stem.removesuffix(SIZE) for stem in recipes), *ALIASES})
    raise UserError(f"{error} (`seqarch mixers` and `seqarch recipes` list all)")
