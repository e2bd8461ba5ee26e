"""What belongs to one system alone, beside what all of them share."""
