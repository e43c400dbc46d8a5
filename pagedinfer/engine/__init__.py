"""The engine: requests, the scheduler's plan of a step, and the loop that runs it. Standard library only."""
