"""Making it so: the executor and its store."""
