"""Recipes: what goes into an image, read from YAML and checked before anything is done."""

from sqshforge.recipe.parts import Base, Bootstrap, Python, Recipe, normalize
from sqshforge.recipe.read import find, load, schema, targets, whole

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
