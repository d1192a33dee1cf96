"""What is there: the probe that runs on hosts, and the facts made of its report."""
