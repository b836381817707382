"""Python imports this when it starts: `import torch` then brings the emulated device along, if the environment asks."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class Finder(importlib.abc.MetaPathFinder):
    """Loads the libraries before torch is imported, and gives torch.cuda its functions after that."""

    is_asking = False
    """True while the other finders are asked."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.is_asking:
            return None
        self.is_asking = True
        spec = importlib.util.find_spec("torch")
        self.is_asking = False
        execute = spec.loader.exec_module

        def load(module):
            sys.meta_path.remove(self)  # not before: who looks for torch need not import it
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
            from emulated_cuda import loading

            library = loading.load_libraries()
            execute(module)
            loading.adopt(library)

        spec.loader.exec_module = load
        return spec


if os.environ.get("EMULATED_CUDA"):
    sys.meta_path.insert(0, Finder())
