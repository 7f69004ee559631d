"""The example of a vision-language model: squares are counted, their color is named."""
