"""What people want to do, in their own words, and the object that does it.

The documentation says "recursively copy an entire directory tree", people say "copy a folder".  Written for
this project (MIT).  Each phrase continues "How do I ...?"; `|` separates them.
"""

from __future__ import annotations

_WRITTEN = """
abs: get the absolute value of a number|drop the sign of a number|make a negative number positive
all: check that every item is true|test whether all elements are true
any: check whether at least one item is true|test if some element is true
bin: convert a number to binary|show an integer in base 2
chr: turn a code point into a character|get the character for a number
dir: list the attributes of an object|see which names an object has
divmod: get the quotient and the remainder at once|divide with remainder
enumerate: loop over a list with an index|number the items of a list|get the index while iterating
eval: evaluate a string as an expression|run an expression that is in a string
filter: keep only some items of a list|drop the items that do not match
float: convert a string to a float|parse a decimal number
getattr: read an attribute by its name|get an attribute whose name is in a variable
hasattr: check whether an object has an attribute|test if an attribute exists
hash: get the hash value of an object
hex: convert a number to hexadecimal|show an integer in base 16
id: get the identity of an object|find out where an object lives
input: ask the user for input|read a line from the keyboard|prompt the user
int: convert a string to an integer|parse a whole number
isinstance: check the type of an object|test whether a value is a list|check if a variable is a string
issubclass: check whether a class inherits from another
iter: get an iterator from a list
len: get the length of a list|count the items of a list|find out how long a string is
map: apply a function to every item of a list|call a function on each element
max: find the largest item|get the biggest number in a list|find the maximum
min: find the smallest item|get the lowest number in a list|find the minimum
next: get the next item of an iterator
open: open a file|read a text file|write to a file
ord: get the code point of a character|turn a character into a number
pow: raise a number to a power
print: print something on the screen|output text|show a value in the terminal
range: loop a fixed number of times|count from one number to another|make a sequence of numbers
repr: get the printable form of an object
reversed: loop over a list backwards|go through a list in reverse
round: round a number|round to two decimal places
set: remove duplicates from a list|make a set
setattr: set an attribute by its name
sorted: sort a list|get a sorted copy|put items in order
str: convert a number to a string|turn something into text
sum: add up the numbers in a list|get the total of a list|sum a list
super: call a method of the parent class|call the base class
type: find out the type of a value|get the class of an object
vars: get the attributes of an object as a dictionary
zip: loop over two lists at the same time|pair up the items of two lists|combine two lists item by item
str.split: split a string|break a string into words|cut a text at every comma
str.join: join a list of strings|glue strings together|put commas between words
str.strip: remove spaces at both ends of a string|trim a string|strip whitespace
str.lstrip: remove leading spaces from a string
str.rstrip: remove trailing spaces from a string|drop the newline at the end of a line
str.replace: replace text in a string|swap one word for another in a string
str.startswith: check how a string begins|test whether a text starts with a prefix
str.endswith: check how a string ends|test whether a file name ends with .txt
str.find: find text in a string|get the position of a substring|search in a string
str.count: count how often a word is in a string|count the occurrences of a substring
str.upper: make a string upper case|convert text to capitals
str.lower: make a string lower case|convert text to small letters
str.title: capitalize every word of a string
str.capitalize: make the first letter of a string a capital
str.casefold: compare strings and ignore case
str.format: put values into a string|fill in the placeholders of a string
str.isdigit: check whether a string is a number|test if a string holds only digits
str.isalpha: check whether a string holds only letters
str.encode: convert a string to bytes|encode text as UTF-8
str.splitlines: split a text into lines|get the lines of a string
str.partition: split a string at the first separator|cut a string in two
str.zfill: pad a number with zeros|add leading zeros
str.center: center a string
str.ljust: pad a string on the right
str.rjust: align a string to the right|pad a string on the left
str.removeprefix: remove a prefix from a string
str.removesuffix: remove a suffix from a string|drop the file extension from a string
bytes.decode: convert bytes to a string|turn bytes into text
list.sort: sort a list in place
list.append: add an item to a list|put something at the end of a list
dict.get: look up a key with a default|read a key that may be missing
dict.items: loop over keys and values|iterate over a dictionary
dict.keys: get all keys of a dictionary
dict.values: get all values of a dictionary
dict.pop: remove a key from a dictionary and get its value
dict.update: merge two dictionaries|add the entries of one dictionary to another
dict.setdefault: get a value and set it when the key is missing
dict.copy: make a shallow copy of a dictionary
dict.clear: empty a dictionary|remove everything from a dictionary
os.path.join: join two paths|combine a folder and a file name|put paths together|build a file path
os.path.exists: check whether a file exists|test if a path exists|see if a file is there
os.path.basename: get the file name from a path|get the last part of a path
os.path.dirname: get the folder of a path|get the directory part of a path
os.path.splitext: get the extension of a file|split off the file extension
os.path.abspath: make a path absolute|get the full path of a file
os.path.isfile: check whether a path is a file
os.path.isdir: check whether a path is a folder|test if a directory exists
os.path.expanduser: expand ~ in a path|get the path of the home folder
os.path.getsize: get the size of a file|find out how big a file is
os.path.realpath: resolve symbolic links in a path|follow symlinks
os.path.split: split a path into folder and file name
os.listdir: list the files of a folder|list the files in a directory|see what is in a folder
os.makedirs: create nested folders|create a folder and its parents|make several directories at once
os.mkdir: create a folder|make a directory|make a new folder
os.remove: delete a file|remove a file
os.rename: rename a file|give a file another name
os.getcwd: get the current working directory|find out which folder I am in|print the current directory
os.chdir: change the current directory|go to another folder
os.walk: go through all files in all subfolders|walk through a directory tree|visit every subfolder
os.environ: read an environment variable|set an environment variable|see the environment
os.getenv: get the value of an environment variable
os.scandir: iterate over the entries of a directory
os.stat: get information about a file|find out when a file was changed
os.rmdir: remove an empty folder|delete an empty directory
os.getpid: get the process id|find out my own pid
os.cpu_count: count the processors|find out how many cores there are
os.urandom: get random bytes
os.chmod: change the permissions of a file|make a file executable
os.kill: send a signal to a process|kill another process
os.system: run a shell command|execute a command in a shell
sys.argv: read the command line arguments|get the arguments of a script
sys.exit: stop the program|exit a script|quit with an exit code
sys.path: see where modules are searched for
sys.stdin: read from standard input
sys.version: find out the Python version
sys.modules: see which modules are loaded
sys.platform: find out the operating system
sys.getsizeof: find out how much memory an object takes|get the size of an object
re.match: match a pattern at the start of a string
re.search: search a string with a regular expression|find a pattern anywhere in a string
re.sub: replace text with a regular expression|replace everything that matches a pattern
re.findall: find all matches of a pattern|get every number in a text
re.finditer: loop over all matches of a pattern
re.compile: prepare a regular expression|reuse a pattern
re.split: split a string by a regular expression|split a text at a pattern
re.fullmatch: check that a whole string matches a pattern
re.escape: escape special characters for a regular expression
json.loads: parse a JSON string|turn JSON text into a dictionary
json.dumps: convert a dictionary to JSON|turn an object into a JSON string
json.load: read a JSON file|load JSON from a file
json.dump: write JSON to a file|save a dictionary as a JSON file
pathlib.Path.mkdir: create a directory with pathlib
pathlib.Path.read_text: read a whole file into a string|get the contents of a file as text
pathlib.Path.write_text: write a string to a file|save text to a file
pathlib.Path.glob: find files by a pattern with pathlib
pathlib.Path.rglob: find files in all subfolders by a pattern
pathlib.Path.iterdir: loop over the files of a folder with pathlib
pathlib.Path.home: get the home directory|find the user's home folder
pathlib.Path.unlink: delete a file with pathlib
pathlib.Path.resolve: make a path absolute and resolve symlinks
shutil.copy: copy a file|make a copy of a file|copy a file to another folder
shutil.copy2: copy a file with its metadata|copy a file and keep its dates
shutil.copytree: copy a folder|copy a directory with everything in it|duplicate a whole folder
shutil.rmtree: delete a folder with everything in it|remove a directory that is not empty|delete a whole folder
shutil.move: move a file|move a folder to another place
shutil.which: find out where a program is installed|check whether a command is installed
shutil.disk_usage: find out how much disk space is free|get the free space of a disk
shutil.make_archive: make a zip file of a folder|create an archive|pack a folder into an archive
shutil.unpack_archive: unpack an archive|extract an archive file
shutil.get_terminal_size: get the size of the terminal|find out how wide the terminal is
subprocess.run: run a program|run a command and wait for it|start another program
subprocess.Popen: start a program in the background|run a command without waiting
subprocess.check_output: get the output of a command|capture what a program prints
datetime.datetime.now: get the current time|get the current date and time|find out what time it is
datetime.datetime.strftime: format a date|turn a date into a string
datetime.datetime.strptime: parse a date|turn a string into a date|read a date from text
datetime.timedelta: add days to a date|compute the difference between two dates
datetime.date.today: get today's date|find out what day it is
datetime.datetime.fromisoformat: parse an ISO date|read a date in ISO format
datetime.datetime.isoformat: write a date in ISO format
datetime.datetime.timestamp: convert a date to a timestamp
time.time: get the seconds since the epoch|get a Unix timestamp
time.sleep: wait a few seconds|pause a program|let a program sleep
time.perf_counter: measure how long code takes|time a piece of code
time.monotonic: get a clock that never goes backwards
collections.Counter: count how often each item appears|count words|count the items in a list by value
collections.Counter.most_common: find the most common words|get the most frequent items
collections.deque: make a queue with fast ends|add and remove at both ends
collections.deque.appendleft: add an item at the front of a deque
collections.deque.popleft: take an item from the front of a deque
collections.defaultdict: make a dictionary with default values|avoid a KeyError for missing keys
collections.namedtuple: make a tuple with named fields
collections.OrderedDict: make a dictionary that remembers the order
collections.ChainMap: look up a key in several dictionaries
itertools.chain: join several lists into one iterator|loop over several lists one after the other
itertools.product: get all combinations of two lists|compute the cartesian product|replace nested loops
itertools.permutations: get all orderings of a list|make all permutations
itertools.combinations: get all pairs of a list|choose items in every possible way
itertools.count: count up without end
itertools.cycle: repeat a list forever|loop over a list again and again
itertools.repeat: repeat a value
itertools.islice: take the first items of an iterator|slice an iterator
itertools.groupby: group the items of a list|group consecutive items
itertools.accumulate: compute running totals|get cumulative sums
itertools.zip_longest: zip lists of different lengths
itertools.takewhile: take items as long as a condition holds
itertools.dropwhile: skip items as long as a condition holds
functools.lru_cache: cache the results of a function|remember recent results|memoize a function
functools.cache: cache every result of a function
functools.partial: fix some arguments of a function|fill in arguments in advance
functools.reduce: reduce a list to one value|fold a list
functools.wraps: keep the name of a decorated function|write a decorator
functools.cached_property: compute a property only once
functools.total_ordering: get all comparison methods for a class
random.choice: pick a random item|choose a random element of a list
random.choices: pick several random items with repetition|choose with weights
random.sample: pick several different random items|draw without replacement
random.shuffle: shuffle a list|put a list in random order|mix up a list
random.randint: get a random whole number|roll a die|get a random integer
random.random: get a random number between 0 and 1
random.uniform: get a random float in a range
random.seed: make random numbers repeatable|set the random seed
math.sqrt: get the square root of a number|compute a square root
math.floor: round a number down
math.ceil: round a number up|round up to the next integer
math.gcd: find the greatest common divisor
math.factorial: compute a factorial
math.log: compute a logarithm
math.exp: compute e to a power
math.sin: compute the sine of an angle
math.cos: compute the cosine of an angle
math.pi: get the value of pi
math.isclose: compare two floats|check whether two floats are nearly equal
math.hypot: compute the length of the hypotenuse
math.prod: multiply all numbers of a list
math.comb: count the ways to choose items
math.isnan: check for NaN
math.degrees: convert radians to degrees
math.radians: convert degrees to radians
statistics.mean: compute the average|get the mean of a list of numbers
statistics.median: find the median
statistics.stdev: compute the standard deviation
statistics.mode: find the most common value
string.ascii_letters: get all letters of the alphabet
textwrap.wrap: break a long text into lines|wrap text at a width
textwrap.fill: wrap a paragraph into one string
textwrap.dedent: remove the common indentation of a text
textwrap.indent: indent every line of a text
textwrap.shorten: shorten a text to a length
logging.basicConfig: set up logging|configure logging
logging.getLogger: get a logger
logging.warning: log a warning
argparse.ArgumentParser: parse command line options|write a command line program
argparse.ArgumentParser.add_argument: add a command line option
csv.reader: read a CSV file|parse a CSV file
csv.writer: write a CSV file|save rows as CSV
csv.DictReader: read a CSV file into dictionaries
csv.DictWriter: write dictionaries to a CSV file
sqlite3.connect: open a SQLite database|connect to a database
threading.Thread: start a thread|run a function in a thread
threading.Lock: protect data from several threads|make a lock
threading.Event: let one thread signal another
threading.Timer: call a function after some seconds
queue.Queue: pass data between threads
asyncio.run: run a coroutine|start an async program
asyncio.sleep: wait in a coroutine
asyncio.gather: run several coroutines at once|wait for several coroutines
asyncio.create_task: start a coroutine in the background
asyncio.wait_for: give a coroutine a time limit|wait with a timeout
urllib.request.urlopen: download a web page|fetch a URL
urllib.parse.urlparse: split a URL into its parts|parse a URL
urllib.parse.quote: escape characters in a URL|URL-encode a string
urllib.parse.urlencode: build a query string
urllib.parse.urljoin: join a relative URL with a base
tempfile.TemporaryDirectory: make a temporary directory|create a temporary folder that is deleted afterwards
tempfile.NamedTemporaryFile: make a temporary file|create a temporary file with a name
tempfile.mkdtemp: create a temporary folder that stays
tempfile.gettempdir: find the folder for temporary files
glob.glob: find files that match a wildcard|list all .txt files|find files by a pattern
fnmatch.fnmatch: test a file name against a wildcard
hashlib.sha256: compute a SHA-256 hash|hash some data
hashlib.md5: compute an MD5 checksum
base64.b64encode: encode data as Base64
base64.b64decode: decode Base64
secrets.token_hex: make a random token in hex|generate a secret key
secrets.choice: pick a random item securely
secrets.token_urlsafe: make a random token for a URL
uuid.uuid4: make a random UUID|generate a unique id
copy.copy: make a shallow copy of an object
copy.deepcopy: make a deep copy|copy a nested list|copy an object with everything in it
pickle.dumps: pickle an object to bytes|serialize an object to bytes
pickle.loads: unpickle bytes
pickle.dump: save an object to a file|pickle an object to a file
pickle.load: load a pickled object from a file
enum.Enum: define an enumeration|make named constants
dataclasses.dataclass: make a class that only holds data|write a class without boilerplate
dataclasses.field: give a dataclass field a default factory
dataclasses.asdict: convert a dataclass to a dictionary
typing.Optional: say that a value may be None
contextlib.contextmanager: write a context manager with a generator
contextlib.suppress: ignore an exception|suppress errors
contextlib.redirect_stdout: capture printed output|redirect print to a file
abc.abstractmethod: declare an abstract method
inspect.signature: get the parameters of a function|look at the signature of a function
inspect.getsource: get the source code of a function|see the source of an object
io.StringIO: make a file in memory|treat a string as a file
io.BytesIO: make a binary file in memory
operator.itemgetter: sort by the second item|get an item as a function
operator.attrgetter: sort objects by an attribute
heapq.heappush: add an item to a heap
heapq.heappop: take the smallest item from a heap
heapq.heapify: turn a list into a heap
heapq.nlargest: find the largest items of a list
heapq.nsmallest: find the smallest items of a list
heapq.merge: merge sorted lists
bisect.bisect_left: find a position in a sorted list
bisect.insort: insert into a sorted list|keep a list sorted
decimal.Decimal: compute with exact decimals|calculate with money
fractions.Fraction: calculate with fractions
struct.pack: pack values into bytes
struct.unpack: unpack values from bytes
zipfile.ZipFile: read a zip file|open a zip archive
tarfile.open: open a tar archive
gzip.open: read a gzip file|open a compressed file
pprint.pprint: print nested data nicely|pretty-print a dictionary
traceback.print_exc: print the traceback of an exception
traceback.format_exc: get a traceback as a string
warnings.warn: issue a warning
calendar.isleap: check for a leap year
calendar.monthrange: find out how many days a month has
getpass.getpass: ask for a password|read a password without showing it
getpass.getuser: get the name of the user|find out who is logged in
platform.system: find out whether this is Linux or Windows
shlex.split: split a command line
shlex.quote: quote an argument for the shell
configparser.ConfigParser: read an INI file|read a configuration file
timeit.timeit: measure the speed of a small piece of code
html.escape: escape HTML
html.unescape: decode HTML entities
difflib.get_close_matches: find similar words|suggest a spelling
difflib.unified_diff: compare two texts|make a diff
multiprocessing.Pool: use several processes|run a function on all cores
multiprocessing.Process: start another Python process
concurrent.futures.ThreadPoolExecutor: run functions in a pool of threads
concurrent.futures.ProcessPoolExecutor: run functions in a pool of processes
signal.signal: handle a signal|react to Ctrl-C
atexit.register: run code when the program ends
zlib.compress: compress bytes
"""

TASKS: dict[str, tuple[str, ...]] = {
    name: tuple(phrases.strip().split("|"))
    for name, phrases in (line.split(":", 1) for line in _WRITTEN.strip().splitlines())
}
