"""Our Mamba, data and schedules in MosaicML's Composer, as in the Composer system for Mamba.

training.mamba_composer is the entry point. Reading and checking config.yaml needs neither torch nor
Composer.
"""
