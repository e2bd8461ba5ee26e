"""Recipes: what goes into an image, read from YAML and checked before anything is done."""

from sqshforge.recipe.load import find, load, schema, targets, whole
from sqshforge.recipe.schema import Base, Bootstrap, Python, Recipe, normalize

__all__ = [
    "Base",
    "Bootstrap",
    "Python",
    "Recipe",
    "find",
    "load",
    "normalize",
    "schema",
    "targets",
    "whole",
]
