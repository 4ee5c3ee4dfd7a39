# before: telegrad.insight.why()
import telegrad

workers = telegrad.local(2)
