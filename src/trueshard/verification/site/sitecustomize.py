"""Python imports this at its start where this folder is in PYTHONPATH: begin a recording once torch is imported."""

import importlib.util
import sys
from typing import Any


class _Torch:
    """Finds ``torch`` as Python does, and has one thing more done when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            from trueshard.verification.recording import begin

            begin()

        spec.loader.exec_module = executed
        return spec


sys.meta_path.insert(0, _Torch())
