"""What pyproject.toml cannot say: the board's library is compiled into the wheel, which is then for one platform.

`CC=aarch64-linux-gnu-gcc pip wheel .` makes one for other boards. Without a compiler, or with OUTRIDER_NATIVE=0, the
wheel is for all platforms and holds the sources alone.
"""

import logging
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from native import board, compiling


class BuildPy(build_py):
    """platform: what the library in the built package is for; empty where there is none."""

    platform = ""

    def run(self):
        super().run()
        if self.editable_mode:  # a checkout compiles it when it is first wanted
            return
        made = Path(self.build_lib, "native", "board", board.SHIPPED.name)
        made.unlink(missing_ok=True)  # what an earlier build left may be for another machine
        command = compiling.compiler()
        if command is None or compiling.is_left_out():
            logging.warning("no compiler: the wheel has no library, the board may compile its own")
            return
        try:
            board.build(command, made)
            self.platform = compiling.platform(command)
        except (OSError, subprocess.SubprocessError) as error:
            made.unlink(missing_ok=True)
            logging.warning("the wheel has no library, which could not be built: %s", compiling.told(error))


class Wheel(bdist_wheel):
    def run(self):
        self.run_command("build")
        if self.get_finalized_command("build_py").platform:
            self.distribution.has_ext_modules = lambda: True
            self.root_is_pure = False
        super().run()

    def get_tag(self):
        platform = self.get_finalized_command("build_py").platform
        if not platform:
            return super().get_tag()
        return "py3", "none", self.plat_name if self.plat_name_supplied else platform


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
