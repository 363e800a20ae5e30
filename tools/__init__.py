"""What `make` runs: set-up, notebooks from text, static pages. Learners need only `make`."""
