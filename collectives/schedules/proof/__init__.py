"""The proof of a schedule: values (`verify`), memory (`races`), and its meaning as a program over arrays (`replay`)."""
