"""How training.llama_smp, the entry point for SMP v2, reads that system's flags. No torch."""
