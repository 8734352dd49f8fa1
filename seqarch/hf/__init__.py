"""Models of seqarch in Hugging Face's transformers; importing this package registers them with its Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from seqarch.hf.model import SeqarchConfig, SeqarchForCausalLM
from seqarch.hf.world import RWKVWorldTokenizer

__all__ = ["RWKVWorldTokenizer", "SeqarchConfig", "SeqarchForCausalLM"]

AutoConfig.register(SeqarchConfig.model_type, SeqarchConfig, exist_ok=True)
AutoModelForCausalLM.register(SeqarchConfig, SeqarchForCausalLM, exist_ok=True)
AutoTokenizer.register(SeqarchConfig, slow_tokenizer_class=RWKVWorldTokenizer, exist_ok=True)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(SeqarchConfig.model_type, SeqarchForCausalLM.__name__)  # lm-eval asks it
