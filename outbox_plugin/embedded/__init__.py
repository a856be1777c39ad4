"""Real servers on the user's machine, for development, the demo and tests: Postgres, and Kafka with a Java, which Spark
uses, too. They end when the process that started them ends, even if that is killed.
"""
