# Setup: installs only what is missing, and never touches torch.
import importlib.util
import subprocess
import sys
from pathlib import Path


def setup(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    folders = [Path.cwd(), *Path.cwd().parents]
    checkout = next((folder for folder in folders if (folder / "pagedinfer" / "course").is_dir()), None)
    if not missing:
        print("Everything is here.")
    elif "torch" in missing:
        print("torch is missing: install it for your machine, then run this cell again.")
    elif "pagedinfer" in missing and checkout is None:
        print("pagedinfer is missing: clone its repository, and open this notebook inside the clone.")
    else:
        wanted = [str(checkout) if name == "pagedinfer" else name for name in missing]
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted])
        importlib.invalidate_caches()
        print("Could not install" if done.returncode else "Installed", ", ".join(missing))
