"""Starting worker processes: on this machine, through Ray, or by others."""
