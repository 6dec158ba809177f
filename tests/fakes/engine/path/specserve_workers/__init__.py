"""The real package with two entry points replaced: what is not in this folder is found behind it on the path."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
