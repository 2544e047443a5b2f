"""pip compiles one optional module; without a C compiler a Python function replaces it."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "bridge.daemon.fetch._rows",
            ["bridge/daemon/fetch/csrc/rows.c"],
            extra_compile_args=["-O2"],
            optional=True,
        )
    ]
)
