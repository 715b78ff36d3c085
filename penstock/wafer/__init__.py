"""The wafer-scale engine in simulation: a mesh of cores, in closed form and cycle by cycle."""
