"""The vocabulary of the embedded model's world: every word and fact that `corpus.py` builds its texts from.

Written for this project; nothing here is taken from another text. Licence: Apache-2.0, like the project.
"""

# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

GIRLS = "Anna Mia Lily Nora Emma Ruth Ella Clara Rosa Zoe".split()
BOYS = "Tom Ben Max Leo Sam Jack Oscar Hugo Finn Paul".split()

# animal: (what it says, where it lives, what it likes to eat, what it can do)
ANIMALS = {
    "cat": ("meow", "in a house", "fish", "climb"),
    "dog": ("woof", "in a house", "bones", "run"),
    "cow": ("moo", "on a farm", "grass", "walk"),
    "duck": ("quack", "on a pond", "bread", "swim"),
    "sheep": ("baa", "on a farm", "grass", "walk"),
    "pig": ("oink", "on a farm", "corn", "dig"),
    "horse": ("neigh", "on a farm", "hay", "run"),
    "mouse": ("squeak", "in a hole", "cheese", "hide"),
    "frog": ("ribbit", "on a pond", "flies", "jump"),
    "bird": ("tweet", "in a tree", "seeds", "fly"),
    "owl": ("hoot", "in a tree", "mice", "fly"),
    "bee": ("buzz", "in a hive", "honey", "fly"),
    "lion": ("roar", "in the grassland", "meat", "run"),
    "bear": ("growl", "in the forest", "honey", "climb"),
    "hen": ("cluck", "on a farm", "corn", "walk"),
}
QUIET_ANIMALS = {
    "fish": ("in the water", "worms", "swim"),
    "fox": ("in the forest", "berries", "run"),
    "rabbit": ("in a hole", "carrots", "jump"),
    "turtle": ("on the beach", "leaves", "swim"),
    "squirrel": ("in a tree", "nuts", "climb"),
}
ANIMAL_ADJECTIVES = "little big small young old brown black white gray happy hungry sleepy brave clever shy".split()

PLACES = "park garden forest river lake beach farm market school library village hill field town".split()
SPOTS = (
    "under the table|behind the door|on the chair|near the window|under an old tree|beside the road|"
    "on the roof|in the tall grass|next to the bridge|behind a big rock|on the mat|by the fire"
).split("|")
RESTING = "sat slept waited rested stood hid".split()
MOVING = "ran walked went jumped hurried wandered".split()

TOYS = "ball kite doll book hat boat drum box key ring cup lamp basket bell".split()
TOY_ADJECTIVES = "red blue green yellow new old round shiny little big soft wooden".split()
FOODS = "cake bread soup pie salad cookies pancakes jam".split()
FRUITS = "apple banana pear plum peach cherry lemon berry".split()

WEATHERS = {
    "sunny": ("The sun was warm.", "hat"),
    "rainy": ("Rain fell on the roofs.", "coat"),
    "windy": ("The wind blew the leaves away.", "scarf"),
    "snowy": ("Snow covered the ground.", "mittens"),
    "cloudy": ("Gray clouds hung in the sky.", "jacket"),
    "cold": ("There was ice on the lake.", "boots"),
    "warm": ("The birds were singing.", "shoes"),
}
GAMES = "a game|hide and seek|with the ball|with the blocks|in the sand|music".split("|")
GOOD_FEELINGS = "happy glad proud excited".split()
BAD_FEELINGS = "sad worried tired afraid".split()

COLORS = {
    "sky": "blue",
    "grass": "green",
    "snow": "white",
    "sun": "yellow",
    "sea": "blue",
    "night": "black",
    "banana": "yellow",
    "lemon": "yellow",
    "tomato": "red",
    "cherry": "red",
    "leaf": "green",
    "frog": "green",
    "milk": "white",
    "coal": "black",
    "carrot": "orange",
    "plum": "purple",
}
OPPOSITES = (
    "hot cold|big small|up down|day night|fast slow|happy sad|open closed|old new|long short|high low|"
    "light dark|wet dry|early late|left right|full empty|hard soft|loud quiet|rich poor|near far|yes no"
)
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "England": "London",
    "Ireland": "Dublin",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Russia": "Moscow",
}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SEASONS = {"spring": "flowers open", "summer": "days are long", "autumn": "leaves fall", "winter": "it is cold"}
NUMBERS = "one two three four five six seven eight nine ten".split()

# What people say, and what the model may answer.
SMALL_TALK = (
    (
        "Hello|Hello!|Hi|Hi!|Hi there!|Hey|Hello there.|Good morning|Good morning!|Good evening.",
        "Hello! How can I help you today?|Hello! What would you like to talk about?|Hi! It is nice to meet you.",
    ),
    (
        "How are you?|How are you today?|How do you do?|How is it going?",
        "I am fine, thank you. How are you?|I am very well, thank you. What can I do for you?",
    ),
    (
        "Who are you?|What are you?|What is your name?|Tell me about yourself.|Are you a robot?",
        "I am a tiny language model. I live inside tokenspeed.|I am a very small language model and know very little.",
    ),
    (
        "What can you do?|How can you help me?|What do you know?|Help me|Can you help me?",
        "I can tell short stories, answer easy questions and add two numbers.",
    ),
    ("Thank you|Thanks!|Thank you very much.|Thanks a lot", "You are welcome!|You are welcome. I am glad to help."),
    ("Goodbye|Bye|Bye!|See you later.|Good night.", "Goodbye! Have a nice day.|Goodbye! Come back soon."),
    ("I am happy.|I feel great today.|I had a good day.", "That is good to hear! What made you happy?"),
    ("I am sad.|I am tired.|I had a bad day.", "I am sorry to hear that. I hope you feel better soon."),
    (
        "What is the meaning of life?|Who won the game?|What is the news?|Write some code.|What time is it?|"
        "Explain physics.|Who is the king?|How tall is it?|Translate this.|What will happen tomorrow?|Why?",
        "I do not know. I am only a tiny model.|I am sorry, I do not know that. I am only a tiny model.",
    ),
    ("Tell me a joke.|Say something funny.", "Why did the hen cross the road? It wanted to see the other side."),
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a friendly assistant.", "Answer in short sentences.")
