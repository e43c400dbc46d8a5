"""What happened: events, the bus that carries them, recordings, and the fold that rebuilds any step."""
