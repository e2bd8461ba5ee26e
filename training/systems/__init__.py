"""Code that belongs to one system alone; one module or package each."""
