"""Recipes: what goes into an image, read from YAML and validated before anything is done."""

from sqshforge.recipe.load import ancestors, find, load, platforms_of, schema, targets, whole
from sqshforge.recipe.parts import Base, Bootstrap, Python, Source, Triton
from sqshforge.recipe.schema import Recipe
from sqshforge.recipe.words import normalize

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
    "platforms_of",
    "schema",
    "targets",
    "whole",
]
