"""Optimizers of a recipe: their groups of parameters, and Muon."""

import collections
import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from seqarch.arguments import Count, Interval, Limited
from seqarch.errors import UserError, refused
from seqarch.model.roles import Kind
from seqarch.model.transfer import Factors

Group = dict[str, Any]
OptimizerFactory = Callable[[list[Group], float], Optimizer]
"""Makes an optimizer from groups of parameters and a learning rate."""
QUINTIC = (3.4445, -4.775, 2.0315)
"""Coefficients of the iteration that orthogonalises (K. Jordan 2024, kellerjordan.github.io/posts/muon)."""
RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's step over its learning rate (arXiv 2502.16982)."""
OF_THE_MODEL = ("betas", "weight_decay")
"""Options that an optimizer takes from the section `model`."""
UNUSED = {"betas": (0.9, 0.95), "weight_decay": 0}
"""Their values with an optimizer that takes none."""


class Muon(Limited, Optimizer):
    """Muon for matrices, fused AdamW for all other parameters, as one optimizer with one state.

    A matrix takes a step along its orthogonalised momentum (K. Jordan 2024). With "match_rms_adamw" the step has the
    size of AdamW's at the same learning rate, so AdamW's rate and weight decay serve both (Liu et al. 2025, arXiv
    2502.16982, equation 4). With "spectral" it has the spectral norm `sqrt(rows / columns)`, so that outputs change
    alike at all widths (Yang et al. 2023, arXiv 2310.17813); `model.base_width` chooses this. Fused projections are
    orthogonalised matrix by matrix.
    Under FSDP2 the processes gather whole matrices and share the work.

    Args:
        params: groups of parameters. One with the role "matrix" has the `heights` of the matrices in each parameter.
        lr: learning rate.
        betas: decay rates of AdamW.
        eps: epsilon of AdamW.
        weight_decay: of both, decoupled.
        momentum: decay rate of the momentum of matrices.
        nesterov: whether the step looks ahead along the gradient.
        ns_steps: iterations that orthogonalise.
        adjust_lr_fn: the size of a step: "match_rms_adamw", "original" as in K. Jordan's code, or "spectral".
    """

    option_prefix = "Muon: "
    _others: torch.optim.AdamW | None = None

    def __init__(
        self,
        params: list[Group],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: Annotated[float, Interval(0)] = 1e-8,
        weight_decay: float = 0.1,
        momentum: Annotated[float, Interval(0, 1)] = 0.95,
        nesterov: bool = True,
        ns_steps: Count = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original", "spectral"] = "match_rms_adamw",
    ) -> None:
        self.matrix_defaults = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            if group.get("role") == "matrix":
                group.update({**self.matrix_defaults, **group})
        self._adamw()

    def _adamw(self) -> torch.optim.AdamW | None:
        """AdamW of the groups without matrices, on the state of this optimizer. It adds its options to the groups."""
        others = [group for group in self.param_groups if group.get("role") != "matrix"]
        if not others:
            return None
        if self._others is None:  # a copy of this optimizer has none either
            self._others = torch.optim.AdamW(others, fused=True)
        self._others.param_groups, self._others.state = others, self.state
        return self._others

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step; return what the closure returns."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            if group.get("role") == "matrix":
                self._step_matrices(group)
        if (adamw := self._adamw()) is not None:
            adamw.step()
        return result

    def _step_matrices(self, group: Group) -> None:
        same: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                same.setdefault(parameter.shape, []).append(parameter)
        for parameters in same.values():
            states = [self.state[parameter] for parameter in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                state.setdefault("momentum_buffer", torch.zeros_like(parameter))
            weights = [_own_part(parameter) for parameter in parameters]
            gradients = [_own_part(parameter.grad) for parameter in parameters]
            momenta = [_own_part(state["momentum_buffer"]) for state in states]
            # one kernel for many tensors, as PyTorch's own optimizers have it
            foreach: Any = torch
            foreach._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            nesterov, share = group["nesterov"], group["momentum"]
            updates = foreach._foreach_lerp(gradients, momenta, share) if nesterov else momenta
            steps = [step.to(weights[0].dtype) for step in _orthogonalised(updates, parameters[0], group)]
            foreach._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            foreach._foreach_add_(weights, steps, alpha=-group["lr"])


def _own_part(tensor: Any) -> Tensor:
    """The part of a sharded tensor that this process holds; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _orthogonalised(updates: Sequence[Tensor], like: Tensor, group: Group) -> Sequence[Tensor]:
    """The steps of parameters of one shape, from this process's parts `[m, n]` of their updates, in bf16.

    The parts of all parameters are exchanged for some whole parameters, and back.
    """
    stack = torch.stack([update.bfloat16() for update in updates])  # [N, m, n]
    if not isinstance(like, DTensor):
        return _step_of(stack, group).unbind()
    shape = torch.Size([len(updates), *like.shape])
    strides = (like.numel(), like.shape[1], 1)
    mesh = like.device_mesh
    copies = [Replicate()] * (mesh.ndim - 1)  # of hybrid sharding, each of which computes the same
    by_rows, by_matrix = [*copies, Shard(1)], [*copies, Shard(0)]
    parts = DTensor.from_local(stack, mesh, by_rows, run_check=False, shape=shape, stride=strides)
    whole = _step_of(parts.redistribute(placements=by_matrix).to_local(), group)
    steps = DTensor.from_local(whole, mesh, by_matrix, run_check=False, shape=shape, stride=strides)
    return steps.redistribute(placements=by_rows).to_local().unbind()


def _step_of(updates: Tensor, group: Group) -> Tensor:
    """Steps for a learning rate of 1 from whole `updates [N, m, n]` of fused matrices."""
    steps = []
    for update in updates.split(group["heights"], dim=1):
        m, n = update.shape[1:]
        sizes = {
            "match_rms_adamw": RMS_OF_ADAMW * max(m, n) ** 0.5,
            "original": max(1.0, m / n) ** 0.5,
            "spectral": (m / n) ** 0.5,
        }
        steps.append(orthogonalise(update, group["ns_steps"]) * sizes[group["adjust_lr_fn"]])
    return torch.cat(steps, dim=1)


def orthogonalise(updates: Tensor, steps: int = 5) -> Tensor:
    """Nearly U V^T of each matrix U S V^T of `updates [N, m, n]`: singular values in about 0.7..1.2.

    A Newton-Schulz iteration with a quintic polynomial (K. Jordan 2024), as `torch.optim.Muon` has for one matrix.
    """
    a, b, c = QUINTIC
    tall = updates.shape[1] > updates.shape[2]
    x = updates.mT if tall else updates
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def groups_of(
    parameters: Mapping[str, Tensor],
    kinds: Mapping[str, Kind],
    weight_decay: float,
    rates: Mapping[str, float] | None = None,
) -> list[Group]:
    """A group for each kind of parameters: `role`, `weight_decay` and, of matrices, `heights`.

    Args:
        parameters: by name.
        kinds: by name.
        weight_decay: of those that decay.
        rates: learning rates by name, where they are not all the same; the groups then have `lr`.
    """
    found = {name: (kinds[name], (rates or {}).get(name)) for name in parameters}
    order = sorted({*found.values()}, key=lambda each: (each[0].role, not each[0].decayed, each[0].heights, each[1]))
    groups = []
    for kind, rate in order:
        group: Group = {"params": [each for name, each in parameters.items() if found[name] == (kind, rate)]}
        group |= {"weight_decay": weight_decay * kind.decayed, "role": kind.role}
        group |= {} if rate is None else {"lr": rate}
        groups.append(group | ({"heights": kind.heights} if kind.heights else {}))
    return groups


def transferred_optimizer(
    factory: OptimizerFactory | None,
    parameters: Mapping[str, Tensor],
    kinds: Mapping[str, Kind],
    factors: Mapping[str, Factors],
    base_width: int,
    rate: float,
    options: Group,
) -> Optimizer:
    """`named_optimizer` with the learning rates of `seqarch.model.transfer`, by default AdamW.

    Muon's matrices take spectral steps, as long at the base width as "match_rms_adamw" makes those of square matrices.

    Args:
        factory: makes the optimizer.
        parameters: by name.
        kinds: by name.
        factors: by name.
        base_width: the width for which the learning rate was chosen.
        rate: the learning rate.
        options: of the model.

    Raises:
        UserError: as `named_optimizer`, or the rule does not know this optimizer.
    """
    factory = factory or _fused_adamw
    trial = factory([{"params": [*parameters.values()][:1]}], rate)
    if not isinstance(trial, torch.optim.Adam | Muon):
        raise UserError(f"model.base_width has a rule for AdamW, Adam and Muon, not for {type(trial).__name__}")
    more: Group = {}
    rates = {name: rate * factor.rate for name, factor in factors.items()}
    if isinstance(trial, Muon):
        if trial.matrix_defaults["adjust_lr_fn"] == "original":
            raise UserError("model.base_width chooses adjust_lr_fn of Muon: leave one of them out")
        more = {"adjust_lr_fn": "spectral"}
        of_matrices = rate * RMS_OF_ADAMW * base_width**0.5
        rates |= {name: of_matrices for name in parameters if kinds[name].role == "matrix"}
    groups = groups_of(parameters, kinds, options["weight_decay"], rates)
    for group in groups:
        group["weight_decay"] *= rate / group["lr"]
        group |= more if group["role"] == "matrix" else {}
    return named_optimizer(factory, groups, rate, options)


def _fused_adamw(groups: list[Group], rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=rate, fused=True)


def named_optimizer(factory: OptimizerFactory, groups: list[Group], rate: float, options: Group) -> Optimizer:
    """The optimizer that a recipe names, with the model's `options` as far as it takes them.

    Raises:
        UserError: it cannot take these parameters or options, or an option is set in two places.
    """
    with refused("model.optimizer", UserError, Exception, why=True):  # whatever the optimizer's code raises
        trial = factory([{"params": groups[0]["params"]}], rate)
        takes = inspect.signature(type(trial)).parameters
        for name in OF_THE_MODEL:
            if name in takes and trial.defaults.get(name) != takes[name].default:
                raise UserError(f"{name} is an option of the model, for every optimizer: set model.{name}")
        for name, unused in UNUSED.items():
            if name not in takes and options[name] != unused:
                raise UserError(f"{type(trial).__name__} has no {name}: set model.{name} to {json.dumps(unused)}")
        shared = {name: options[name] for name in OF_THE_MODEL[:1] if name in takes}
        return factory([{**group, **shared} for group in groups], rate)


def state_after_step(optimizer: Optimizer, group: Group, parameter: Tensor) -> Any:
    """The state of a `parameter` in a `group` after a first step of such an optimizer, which itself stays as it is."""
    other = copy.copy(optimizer)
    parameter.grad = torch.zeros_like(parameter)
    other.state, other.param_groups = collections.defaultdict(dict), [{**group, "params": [parameter]}]
    made: Any = next((optimizer.state[each] for each in group["params"] if each in optimizer.state), {})
    for name, each in made.items():  # of an optimizer that makes states before its first step, as torch 2.10's Adagrad
        whole = isinstance(each, Tensor) and each.dim()
        other.state[parameter][name] = torch.zeros_like(parameter) if whole else copy.copy(each)
    other.step()
    return other.state[parameter]


def try_step(optimizer: Optimizer, mesh: DeviceMesh | None) -> None:
    """Raise `UserError` if an optimizer cannot step such parameters, which are split over the processes of a mesh."""
    for group in optimizer.param_groups:
        shape = (sum(group.get("heights", (2,))), 2, 2, 2)[: group["params"][0].dim()]
        what = "parameters" if mesh is None else "parameters that fsdp2 splits"
        message = f"model.optimizer {type(optimizer).__name__} cannot step {what}"
        with refused(message, UserError, Exception, why=True):  # whatever the optimizer's code raises
            parameter = torch.zeros(shape, device=group["params"][0].device)
            parameter = parameter if mesh is None else distribute_tensor(parameter, mesh, [Shard(0)])
            state_after_step(optimizer, group, parameter.requires_grad_())
