"""What a run will need and how it is divided, decided before its first step."""
