"""Python imports this at its start where this folder is in PYTHONPATH: begin a recording once torch is imported.

The environment of the program needs no TrueShard: this one is taken where it has none of its own.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any


class _Torch:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_begin(module: Any) -> None:
            execute(module)
            if importlib.util.find_spec("trueshard") is None:
                sys.path.append(str(Path(__file__).parents[3]))
                importlib.import_module("trueshard")
                sys.path.pop()  # no other package from there
            importlib.import_module("trueshard.verification.recording").begin()

        spec.loader.exec_module = execute_and_begin
        return spec


sys.meta_path.insert(0, _Torch())
