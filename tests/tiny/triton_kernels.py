"""Triton's kernels without a device: run by its interpreter, or compiled for an H100 and not run."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def interpreted(name: str, *others: str) -> Iterator[ModuleType]:
    """Import a module anew with kernels that run in numpy, which are in it or in the others.

    Triton's own helpers have been imported as compiled ones. The interpreter leaves parts of the language patched
    behind, which the compiler must not find.
    """
    import triton
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    language, core = triton.language, triton.language.core
    patched = (language, core, language.math, core.tensor, core.dtype, core.tensor_descriptor_base)
    before = [dict(vars(target)) for target in patched]
    helper = functools.cache(InterpretedFunction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        patch.setattr(JITFunction, "__call__", lambda self, *args, **kwargs: helper(self.fn)(*args, **kwargs))
        forget(patch, name, *others)
        yield importlib.import_module(name)
    for target, names in zip(patched, before, strict=True):
        for attribute, value in names.items():
            if vars(target).get(attribute) is not value:
                setattr(target, attribute, value)


def forget(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Have modules imported anew, and be the old ones again after the patch."""
    for name in names:
        importlib.import_module(name)
    for name in names:
        patch.delitem(sys.modules, name)


def compiled_for_hopper(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, object], num_warps: int = 4, num_stages: int = 3
) -> Any:
    """Compile a kernel; what `types` does not name is an int32, what is a pointer or a stride divides by 16."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if types.get(name, "").startswith("*") or name.endswith("stride")
        },
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
