"""What this machine is: its devices, its instance type, its software, its limits."""
