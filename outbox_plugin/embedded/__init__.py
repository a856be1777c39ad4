"""Real servers on the user's own machine, for development, the demo and tests: Postgres, Kafka, and a Java for both
Kafka and Spark. They end with the process that started them, however that ends.
"""
