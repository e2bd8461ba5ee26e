"""Our Mamba, data and schedules in MosaicML's Composer, as the Composer system for Mamba has them.

training.mamba_composer is the entry point. What reads and checks config.yaml is light: neither
torch nor Composer is needed to refuse a bad file.
"""
