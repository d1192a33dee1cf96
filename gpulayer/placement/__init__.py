"""What goes where, and why not. Pure."""
