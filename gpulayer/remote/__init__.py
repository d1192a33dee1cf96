"""What runs on a host. Standard library only, Python >= 3.9; shipped over the connection, never installed."""
