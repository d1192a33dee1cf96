"""What is asked: documents, inventory and jobs. Pure: no clock, environment, network or files (schemas aside)."""
