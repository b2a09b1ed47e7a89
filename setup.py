"""The C++ kernels for the CPU: five builds of the same sources, for different processors.

pyproject.toml has everything else. `kernels/native_calls.py` loads the best build that the
processor can run. All builds are optional: without a compiler, or on a processor other than x86-64,
the installation succeeds and torch's operators do the work (docs/kernels.md).
"""

from glob import glob

from setuptools import Extension, setup

COMMON = [
    "-O3",
    "-std=c++17",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-pthread",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
BUILDS = {
    "_native_avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    "_native_avx512_vnni": [*AVX512, "-mavx512vnni"],
    "_native_avx512": AVX512,
    "_native_avx2_vnni": [*AVX2, "-mavxvnni"],
    "_native_avx2": AVX2,
}

setup(
    ext_modules=[
        Extension(
            f"kernels.{name}",
            sources=["kernels/native/forward.cpp"],
            depends=sorted(glob("kernels/native/*.h")),
            language="c++",
            extra_compile_args=COMMON + flags,
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name, flags in BUILDS.items()
    ]
)
