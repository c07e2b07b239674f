"""What each endpoint says of itself: metrics scraping, health seen in responses."""
