"""Which dialect a server speaks."""
