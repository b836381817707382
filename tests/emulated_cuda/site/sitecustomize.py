"""Python imports this when it starts: `import torch` then brings the emulated device along, if the environment asks."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class Finder(importlib.abc.MetaPathFinder):
    """Loads the libraries before torch is imported, and gives torch.cuda its functions after that."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def load(module):
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
            from emulated_cuda import loading

            library = loading.load_libraries()
            execute(module)
            loading.adopt(library)

        spec.loader.exec_module = load
        return spec


if os.environ.get("EMULATED_CUDA"):
    sys.meta_path.insert(0, Finder())
