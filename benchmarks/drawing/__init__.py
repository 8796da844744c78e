"""Tables and plots, drawn from the result files and from nothing else."""
