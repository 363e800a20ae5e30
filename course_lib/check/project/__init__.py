"""The final project, exercise 16: its stages, judged from run folders and from short parts that are run again."""
