"""Maps calls onto the store: translate, call, translate back."""
