"""How the door for SMP v2 (training.llama_smp) reads that system's flags. Light: no torch here."""
