"""What replicas of the picker tell each other: picks, requests in flight, and to a newcomer what they know."""
