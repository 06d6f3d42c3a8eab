"""Between the parameters of a model and the flat arrays that transports carry."""
