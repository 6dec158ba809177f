"""Stands in for the real workers where a test puts this folder first on the module path of pods.

Only the entry points of serving pods are replaced: what is not in this folder is found behind it on the path.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
