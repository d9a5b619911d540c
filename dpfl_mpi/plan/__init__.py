"""What a run will need and how long it will take, before it is trained."""
