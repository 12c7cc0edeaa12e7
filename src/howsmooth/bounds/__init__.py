"""What theory says of a layer's Lipschitz constant, over a ball and at a point."""
