"""What `make gpu-compile` finds wrong with a kernel's machine code, and which kernels it looks at."""

from __future__ import annotations

import pytest

from collectives.base import dtypes
from tests.gpu import compile
from tests.support.emulated import host_kernels

pytest.importorskip("ml_dtypes")

CODE = """
        /*0b30*/               @P0 LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0b40*/                   LDG.E.128 R8, desc[UR6][R2.64] ;
        /*1690*/                   STG.E.128 desc[UR6][R8.64], R4 ;
        /*16a0*/                   STG.E.128 desc[UR6][R8.64], R8 ;
        /*16b0*/                   LDG.E.U8 R4, desc[UR6][R2.64] ;
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (CODE, None),
        (CODE + "/*00d0*/ STL.64 [R1+0x8], R2 ;", "spills: 1 x STL"),
        (CODE + "/*0a90*/ LD.E.128 R8, desc[UR6][R2.64] ;", "generic loads: 1 x LD"),
        (CODE + "/*0a90*/ LDG.E.128.CONSTANT R8, desc[UR6][R2.64] ;", "read-only cache"),
        (CODE.replace("LDG.E.128 R8", "LDG.E.64 R8"), r"missing \{'LDG.128': 1\}"),
    ],
)
def test_what_is_wrong_with_code(code: str, expected: str | None) -> None:
    wrong = compile.faults("copy_uint8_unscaled", code)
    if expected is None:
        assert wrong == []
    else:
        with pytest.raises(ValueError, match=expected):
            raise ValueError(*wrong)


def test_every_kernel_is_looked_at() -> None:
    """All that the tests run on the CPU, at least; and each has a promise."""
    asked = {name for dtype in dtypes.NAMES for name in compile.asked_for(dtypes.resolve(dtype))}
    assert asked >= {name for name in host_kernels._bundles() if not name.startswith("pack")}
    assert len(asked) > 200
    assert [name for name in asked if not compile.promised(name)] == [
        name for name in asked if name.startswith("combine_product_complex128")
    ]
