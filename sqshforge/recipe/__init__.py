"""Recipes: what goes into an image, read from YAML and checked before anything is done."""

from sqshforge.recipe.load import ancestors, find, load, schema, targets, whole
from sqshforge.recipe.schema import Base, Bootstrap, Python, Recipe, Source, Triton, normalize

__all__ = [
    "Base",
    "Bootstrap",
    "Python",
    "Recipe",
    "Source",
    "Triton",
    "ancestors",
    "find",
    "load",
    "normalize",
    "schema",
    "targets",
    "whole",
]
