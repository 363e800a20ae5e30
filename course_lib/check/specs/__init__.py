"""One file an exercise: what it asks for, and the mistakes that its check knows."""
