"""One step of training: in this process, or distributed over others."""
