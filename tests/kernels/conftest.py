"""What the tests of Triton kernels need."""

import dataclasses
import functools
import importlib
import math
from pathlib import Path

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from seqarch import kernels
from seqarch.kernels.launch import REGISTERED
from seqarch.testing.compare import poisoned_memory


@pytest.fixture
def interpreter(monkeypatch):
    """Make our kernels and Triton's library run in the interpreter, even if Triton was imported before."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU, `pytest -m gpu` tests the kernels")
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang, interpreter_builder

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in (triton.language, triton.language.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(value.fn))
    for path in Path(kernels.__path__[0]).glob("*/triton.py"):  # here, since a test may run without its coverage
        importlib.import_module(f"seqarch.kernels.{path.parent.name}.triton")
    # At every call of one function by another Triton maps its language to the interpreter anew, a fifth of all time:
    # a launch does it for its own functions, and once is enough for those of Triton's library.
    library = _patch_lang(triton.language.standard.sum.fn)
    monkeypatch.setattr(
        InterpretedFunction, "__call__", lambda self, *args, **options: self.rewrite()(*args, **options)
    )
    _remember_shapes(monkeypatch)
    _convert_what_differs(monkeypatch)
    _check_bounds(monkeypatch)
    # The interpreter computes each sum of integers again to find overflows, but reports them only when debugging.
    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter_builder, "options", options)
    _check_layouts(monkeypatch)
    yield
    library.restore()


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    """Each backend that a CPU can run."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
        request.getfixturevalue("poison")
    return request.param


def _remember_shapes(monkeypatch):
    """Cache NumPy's type, shape and dtype: making them for each value takes half of the interpreter's time."""
    from triton.language import core
    from triton.runtime import interpreter

    make, types = core.block_type.__init__, {}

    def remember(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in types:
            make(self, element_ty, shape)
            types[key] = vars(self)
        vars(self).update(types[key])

    @functools.cache
    def shape(sizes):
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def begin(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape(tuple(type.shape) if type.is_block() else ())

    of_any = interpreter._get_np_dtype
    of_scalar = functools.cache(of_any)

    def numpy_dtype(type):
        scalar = type.element_ty if type.is_block() else type
        return of_any(scalar) if scalar.is_ptr() else of_scalar(scalar)

    monkeypatch.setattr(core.block_type, "__init__", remember)
    monkeypatch.setattr(core.tensor, "__init__", begin)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)


def _convert_what_differs(monkeypatch):
    """Skip steps of a binary operation that change nothing, and spread a scalar in one step: an eighth of the time."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    cast, promote, promoted = TritonSemantic.cast, TritonSemantic.computation_type_impl, {}
    broadcast = TritonSemantic.broadcast_impl_value

    def cast_other_types(self, value, dtype, *rounding, **options):
        return value if value.dtype is dtype else cast(self, value, dtype, *rounding, **options)

    def remember(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in promoted:
            promoted[key] = promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return promoted[key]

    def spread(value, block):
        dtype = value.handle.dtype.scalar
        data = numpy.full(block.shape.values, value.handle.data, interpreter._get_np_dtype(dtype))
        return core.tensor(interpreter.TensorHandle(data, dtype), block.with_element_ty(value.dtype))

    def leave_equal_shapes(self, lhs, rhs):
        left, right = (value.type.shape.values if value.type.is_block() else None for value in (lhs, rhs))
        if left == right:
            return lhs, rhs
        if left is None:
            return spread(lhs, rhs.type), rhs
        return (lhs, spread(rhs, lhs.type)) if right is None else broadcast(self, lhs, rhs)

    monkeypatch.setattr(TritonSemantic, "cast", cast_other_types)
    monkeypatch.setattr(TritonSemantic, "computation_type_impl", remember)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", leave_equal_shapes)


def _check_bounds(monkeypatch):
    """Refuse loads and stores outside of the tensors that a kernel was given."""
    from triton.runtime import interpreter

    begin = interpreter.GridExecutor._init_args_hst
    starts = ends = numpy.empty(0, numpy.uint64)

    def remember(self, args, options):
        nonlocal starts, ends
        found = begin(self, args, options)
        given = (getattr(t, "base", t) for t in (*found[0], *found[1].values()))  # the tensor of a descriptor
        tensors = [t for t in given if isinstance(t, torch.Tensor) and t.numel()]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.element_size() * _extent(t)) for t in tensors)
        starts, ends = numpy.array(spans, numpy.uint64).reshape(-1, 2).T
        ends = numpy.maximum.accumulate(ends)
        return found

    def check(name):
        access = getattr(interpreter.InterpreterBuilder, name)

        def checked(self, pointers, *rest, **options):
            mask = rest[0] if name == "create_masked_load" else rest[1]
            first = pointers.data[mask.data].astype(numpy.uint64, copy=False)
            size = numpy.uint64(interpreter._get_np_dtype(pointers.get_element_ty()).itemsize)
            at = numpy.searchsorted(starts, first, "right")
            if not ((at > 0) & (first + size <= ends[at - 1])).all():
                raise IndexError(f"{name} outside of the kernel's tensors")
            return access(self, pointers, *rest, **options)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, checked)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", remember)
    check("create_masked_load")
    check("create_masked_store")


def _check_layouts(monkeypatch):
    """Refuse results that compiled code does not expect: it takes shape, strides and dtype from an operator's fake."""
    for operator in REGISTERED:

        def checked(*args, _operator=operator, _launch=operator._backend_fns[None]):
            found = _launch(*args)
            with FakeTensorMode() as mode:
                told = _operator(*tree_map_only(torch.Tensor, mode.from_tensor, args))
            pairs = zip(tree_leaves(found), tree_leaves(told), strict=True)
            assert all(_layout(real) == _layout(fake) for real, fake in pairs), f"{_operator} is not as its fake"
            return found

        monkeypatch.setitem(operator._backend_fns, None, checked)


def _layout(t):
    """Dtype, sizes and strides, of which those of one element or of none do not matter."""
    return t.dtype, *((n, n > 1 and t.numel() > 0 and stride) for n, stride in zip(t.shape, t.stride(), strict=True))


def _extent(t):
    """The elements from the first to the last of a tensor, with the gaps between them."""
    return 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))


@pytest.fixture
def poison():
    """Memory that nobody wrote is NaN, or an index far out of range."""
    with poisoned_memory():
        yield


@pytest.fixture
def fresh_compiler():
    """Reset torch.compile: after the shapes of other tests it would compile for symbolic shapes."""
    torch.compiler.reset()
