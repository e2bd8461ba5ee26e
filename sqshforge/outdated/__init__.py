"""Find newer versions of a recipe's pins, and what holds them back."""

from sqshforge.outdated.pins import Pin, counts, require_answers, table
from sqshforge.outdated.survey import Hosts, survey

__all__ = ["Hosts", "Pin", "counts", "require_answers", "survey", "table"]
